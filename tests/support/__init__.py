"""What tests of several areas share: the rank pool and references."""
