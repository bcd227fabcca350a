"""Media that lilo-volume can write to; each implements `lilo_volume.Volume`."""
