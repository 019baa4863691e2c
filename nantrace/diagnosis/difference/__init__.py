"""What two traces of the same step differ in."""
