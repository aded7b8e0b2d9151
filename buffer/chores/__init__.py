"""Single periodic tasks of the leader; `buffer/housekeeping.py` schedules them."""
