-- park: a subscription whose owner has been gone for longer than its retention no longer blocks others (leader).
-- KEYS: leader, subs, sub:NAME, batches:NAME, owner:NAME
-- ARGV: prefix, epoch, token, revision of subs, name, longest absence in ms
-- Returns: {'parked', groups given back} | {'present'} | {'parked already'} | {'contact'} | {'subs'}, or -1 when the
--          leadership is lost
-- Atomic because an owner that returns meanwhile keeps everything. Batches that a member of a pool had cut and not
-- committed go to the others, and a later commit of them is refused (gen): each group is used once (I5).
local leader_key, subs_key, sub_key, batches_key, owner_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
local revision, sub, absent_ms = ARGV[4], ARGV[5], tonumber(ARGV[6])

local BACK_MS, GAP_MS = 15000, 2000
freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
if (redis.call('HGET', subs_key, 'rev') or '0') ~= revision then return {'subs'} end
-- a trainer that could not renew during an outage is back within this time
local grace = math.min(absent_ms, BACK_MS)
if contact(prefix, 'park:' .. sub, math.max(GAP_MS, grace / 2)) <= grace then return {'contact'} end
local s = redis.call('HMGET', sub_key, 'seen', 'parked', 'share')
if redis.call('EXISTS', owner_key) == 1 or now_ms() - tonumber(s[1] or 0) <= absent_ms then return {'present'} end
if s[2] == '1' then return {'parked already'} end
local given = 0
if (s[3] or '') ~= '' then
  given = give_back(prefix, sub, sub_key, batches_key)
  redis.call('HINCRBY', sub_key, 'gen', 1)
  redis.call('HSET', sub_key, 'owner', '')
end
redis.call('HSET', sub_key, 'parked', '1', 'ask', 0)
redis.call('HINCRBY', subs_key, 'rev', 1)
event(prefix, 'subs', '', '')
poke(prefix .. 'gate')
return {'parked', given}
