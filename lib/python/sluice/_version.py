"""The version of the package. libsluice must have the same major and minor number."""
__version__ = "0.1.0"
