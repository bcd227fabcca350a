"""What `lilo demo` is made of: a loop anybody can copy, a server to run it against, a picture of the result."""
