-- skip: places in the order of admission that hold nothing any more are passed over (leader).
-- KEYS: leader, subs, sub:NAME
-- ARGV: prefix, epoch, token, revision of subs, place to be cut next, places passed over
-- Returns: {'skipped' | 'subs' | 'moved', places skipped so far}, or -1 when the leadership is lost
-- Atomic because the position moves once, and the gate sees the places free in that instant.
freeing(ARGV[1])
if not leads(KEYS[1], ARGV[2], ARGV[3]) then return -1 end
if (redis.call('HGET', KEYS[2], 'rev') or '0') ~= ARGV[4] then return {'subs', 0} end
local s = redis.call('HMGET', KEYS[3], 'cum', 'skipped')
if tonumber(s[1] or 0) + tonumber(s[2] or 0) + 1 ~= tonumber(ARGV[5]) then return {'moved', tonumber(s[2] or 0)} end
local skipped = redis.call('HINCRBY', KEYS[3], 'skipped', ARGV[6])
poke(ARGV[1] .. 'gate')
return {'skipped', skipped}
