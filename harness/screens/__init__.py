"""What people see: consoles, reports, the watch screen, the doctor."""
