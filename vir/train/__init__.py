"""From a folder of images to a trained model."""
