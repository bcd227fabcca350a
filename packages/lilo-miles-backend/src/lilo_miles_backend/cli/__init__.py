"""Sub-commands of `lilo` that this package brings (entry-point group `lilo.commands`)."""
