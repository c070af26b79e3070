"""What the models do, shown on photographs that come with other packages."""
