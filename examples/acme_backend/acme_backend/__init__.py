"""An example of a backend of dsv4core."""
