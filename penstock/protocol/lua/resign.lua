-- resign: give up the leadership (a buffer that stops), or the right to record (a recorder that stops).
-- KEYS: leader or recorder
-- ARGV: epoch, token
-- Returns: 1, or 0 when it was not the caller's
-- Atomic because a successor's leadership must not be deleted.
local leader_key = KEYS[1]
local epoch, token = ARGV[1], ARGV[2]

if not leads(leader_key, epoch, token) then return 0 end
return redis.call('DEL', leader_key)
