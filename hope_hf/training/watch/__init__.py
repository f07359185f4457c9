"""What a run reports about itself while it trains: metrics, speed, heartbeats, memory, curves."""
