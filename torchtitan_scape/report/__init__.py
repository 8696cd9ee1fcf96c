"""What a run says of itself: metrics, stragglers, interfaces, memory, forecast, summary, and the text that they share."""
