"""Whether our models hold: cost model, planner and simulator, beside measurements, published figures and laws."""
