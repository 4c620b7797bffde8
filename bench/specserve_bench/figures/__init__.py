"""`make bench`: figures that maintainers measure, a module for each."""
