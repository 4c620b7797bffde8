"""The version, readable without importing the rest."""

VERSION = "0.1.0"
