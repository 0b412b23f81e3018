"""What a user sees and hears: lines, progress, flags in messages, and what signals do."""
