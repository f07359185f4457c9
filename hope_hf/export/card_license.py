"""The licence of weights whose card names none."""

DEFAULT_LICENSE = "apache-2.0"
