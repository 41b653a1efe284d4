"""What people see: reports, the watch screen, the doctor."""
