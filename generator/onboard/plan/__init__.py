"""What will be written, where and why; and writing it, all or nothing."""
