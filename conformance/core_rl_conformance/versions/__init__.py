"""The suite with several versions of a package, in environments that share all other packages."""
