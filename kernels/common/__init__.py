"""What the ops share: dispatch by array type, argument checks, the spec format, verification."""
