"""Reports, the watch screen, the doctor."""
