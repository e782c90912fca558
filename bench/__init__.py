"""What the guard costs, against what else one would use: `make bench`."""
