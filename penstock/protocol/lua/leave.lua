-- leave: a trainer gives its ownership back, so that the next one need not wait for its lease to end.
-- KEYS: owner:NAME
-- ARGV: owner's token
-- Returns: 1, or 0 when it was not the caller's
-- Atomic because a successor's ownership must not be deleted.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
