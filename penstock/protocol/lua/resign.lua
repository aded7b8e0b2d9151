-- resign: give the leadership back (a buffer that stops).
-- KEYS: leader
-- ARGV: epoch, token
-- Returns: 1, or 0 when it was not the caller's
-- Atomic because a successor's leadership must not be deleted.
if not leads(KEYS[1], ARGV[1], ARGV[2]) then return 0 end
return redis.call('DEL', KEYS[1])
