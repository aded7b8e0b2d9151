-- park: a subscription whose owner has been gone for longer than its retention holds up nobody any more (leader).
-- KEYS: leader, subs, sub:NAME, batches:NAME, owner:NAME
-- ARGV: prefix, epoch, token, revision of subs, name, longest absence in ms
-- Returns: {'parked', groups given back} | {'present'} | {'parked already'} | {'contact'} | {'subs'}, or -1 when the
--          leadership is lost
-- Atomic because an owner that comes back meanwhile keeps everything. What a member of a pool had cut and not
-- committed goes to the others, and a later commit of it is refused (gen): each group is used once (I5).
local BACK_MS, GAP_MS = 15000, 2000
local prefix, absent = ARGV[1], tonumber(ARGV[6])
freeing(prefix)
if not leads(KEYS[1], ARGV[2], ARGV[3]) then return -1 end
if (redis.call('HGET', KEYS[2], 'rev') or '0') ~= ARGV[4] then return {'subs'} end
-- a trainer that could not renew for an outage is back within this time
local grace = math.min(absent, BACK_MS)
if contact(prefix, 'park:' .. ARGV[5], math.max(GAP_MS, grace / 2)) <= grace then return {'contact'} end
local s = redis.call('HMGET', KEYS[3], 'seen', 'parked', 'share')
if redis.call('EXISTS', KEYS[5]) == 1 or now_ms() - tonumber(s[1] or 0) <= absent then return {'present'} end
if s[2] == '1' then return {'parked already'} end
local given = 0
if (s[3] or '') ~= '' then
  given = give_back(prefix, ARGV[5], KEYS[3], KEYS[4])
  redis.call('HINCRBY', KEYS[3], 'gen', 1)
  redis.call('HSET', KEYS[3], 'owner', '')
end
redis.call('HSET', KEYS[3], 'parked', '1', 'ask', 0)
redis.call('HINCRBY', KEYS[2], 'rev', 1)
event(prefix, 'subs', '', '')
poke(prefix .. 'gate')
return {'parked', given}
