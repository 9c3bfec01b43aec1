"""Kernels that are compiled by other processes while weights load, so that serving compiles nothing and starts soon."""
