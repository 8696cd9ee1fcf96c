"""What a run says of itself: metrics, stragglers, interfaces, memory, forecast, summary, and text that they share."""
