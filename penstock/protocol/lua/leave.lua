-- leave: a trainer releases its ownership, so that the next one need not wait for its lease to end.
-- KEYS: owner:NAME
-- ARGV: owner's token
-- Returns: 1, or 0 when it was not the caller's
-- Atomic because a successor's ownership must not be deleted.
local owner_key = KEYS[1]
local owner = ARGV[1]

if redis.call('GET', owner_key) ~= owner then return 0 end
return redis.call('DEL', owner_key)
