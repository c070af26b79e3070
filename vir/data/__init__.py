"""From bytes to tensors."""
