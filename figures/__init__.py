"""figures: pictures of stored data."""
