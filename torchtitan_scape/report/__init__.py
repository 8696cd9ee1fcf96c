"""What a run says of itself: metrics, timing, stragglers, memory, forecast, summary."""
