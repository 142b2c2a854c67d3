"""The vocabulary: messages, schedules, layouts, encodings, the collective and its drivers."""
