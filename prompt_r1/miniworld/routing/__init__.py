"""A choice between a dear and a cheap environment in the mini world."""
