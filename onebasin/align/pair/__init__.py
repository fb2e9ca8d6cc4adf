"""Two networks: which element brings one onto the other?"""
