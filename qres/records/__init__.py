"""The result of a scan as frozen records, and JSON both ways.

One word per thing, the same here, in result.json and in the reports. No arrays: everything is small enough to read.
Units are in the names (`_bytes`, `_db`, `_s`); KLD is in nats per token; probabilities and shares are fractions.
A number that does not exist (nothing measured, not finite) is `None`, never NaN: JSON has no NaN.
"""
