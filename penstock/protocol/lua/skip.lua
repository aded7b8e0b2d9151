-- skip: places in the order of admission that are empty now are skipped (leader).
-- KEYS: leader, subs, sub:NAME
-- ARGV: prefix, epoch, token, revision of subs, place to be cut next, places to skip
-- Returns: {'skipped' | 'subs' | 'moved', places skipped so far}, or -1 when the leadership is lost
-- Atomic because the position moves once, and the gate sees the places free in that instant.
local leader_key, subs_key, sub_key = KEYS[1], KEYS[2], KEYS[3]
local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
local revision, place, num_places = ARGV[4], tonumber(ARGV[5]), ARGV[6]

freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
if (redis.call('HGET', subs_key, 'rev') or '0') ~= revision then return {'subs', 0} end
local s = redis.call('HMGET', sub_key, 'cum', 'skipped')
if tonumber(s[1] or 0) + tonumber(s[2] or 0) + 1 ~= place then return {'moved', tonumber(s[2] or 0)} end
local skipped = redis.call('HINCRBY', sub_key, 'skipped', num_places)
poke(prefix .. 'gate')
return {'skipped', skipped}
