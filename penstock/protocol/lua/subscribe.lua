-- subscribe: make or change a subscription's definition.
-- KEYS: subs, sub:NAME
-- ARGV: prefix, name, revision it was planned at ('': any), by an operator (0|1),
--       fields that the members of a pool must agree on (with commas), then field, value, ... of the definition
-- Returns: {revision of subs}; {-1}: one of this name was dropped before, {-5}: its pool was; {-2}: the revision moved;
--          {-3, field}: a field that cannot change once there are groups;
--          {-6, its mode, the one asked for}: groups were admitted and are cut by its mode;
--          {-7, its sampler, the one asked for}: one of them is cohort, which counts places as the other does not;
--          {-4, field, member}: a pool's members must agree on it
-- Atomic because a cut or a seal that was planned on the old definition must see another revision.
-- An operator's values stay when the trainer returns with its own definition; an operator's empty value removes them.
local subs_key, sub_key = KEYS[1], KEYS[2]
local prefix, name, planned_revision, by_operator = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local agreed, first_field = ARGV[5], 6

freeing(prefix)
begin(prefix)
-- groups remember the uses of the one that was dropped
if redis.call('HEXISTS', subs_key, 'was:' .. name) == 1 then return {-1} end
local rev = redis.call('HGET', subs_key, 'rev') or '0'
if planned_revision ~= '' and planned_revision ~= rev then return {-2} end
local live = redis.call('HGET', subs_key, 'sub:' .. name) == 'live'
local given, new = {}, {}
for i = first_field, #ARGV, 2 do
  local f, v = ARGV[i], ARGV[i + 1]
  given[#given + 1] = f
  if by_operator or redis.call('HEXISTS', sub_key, 'set:' .. f) == 0 then new[f] = v end
end
local mode = live and redis.call('HGET', sub_key, 'mode')
if mode and new['mode'] and new['mode'] ~= mode then return {-6, mode, new['mode']} end
-- a cohort counts the places it passed, others the groups they used and disposed of: neither count can continue the
-- other
local sampler = live and (redis.call('HGET', sub_key, 'sampler') or 'fifo')
if sampler and new['sampler'] and (new['sampler'] == 'cohort') ~= (sampler == 'cohort') then
  return {-7, sampler, new['sampler']}
end
-- groups record uses by pool, and places at the gate by the size of what consumed them
local account = new['share'] or redis.call('HGET', sub_key, 'share') or ''
if live and account ~= (redis.call('HGET', sub_key, 'share') or '') then return {-3, 'share'} end
if account ~= '' then
  if redis.call('HEXISTS', subs_key, 'was:share:' .. account) == 1 then return {-5} end
  for _, f in ipairs(redis.call('HKEYS', subs_key)) do
    local other = string.match(f, '^sub:(.*)$')
    if other and other ~= name then
      local key = prefix .. 'sub:' .. other
      if redis.call('HGET', key, 'share') == account then
        for g in string.gmatch(agreed, '[^,]+') do
          if new[g] and new[g] ~= (redis.call('HGET', key, g) or '') then return {-4, g, other} end
        end
      end
    end
  end
  redis.call('HSETNX', subs_key, 'start:' .. account, redis.call('HGET', prefix .. 'counters', 'gone:train') or 0)
end
local changed = not live
-- groups that were gone before it subscribed are not of its stock at the gate
if changed then
  redis.call('HSETNX', sub_key, 'start', redis.call('HGET', prefix .. 'counters', 'gone:train') or 0)
  redis.call('HSETNX', sub_key, 'seen', now_ms())
  local from = new['from'] or 'oldest'
  local since, version = string.match(from, '^completed:(%d+)$'), string.match(from, '^version:(%d+)$')
  if from == 'newest' then since = redis.call('HGET', prefix .. 'counters', 'completed') or 0 end
  if since then redis.call('HSETNX', sub_key, 'since', since) end
  if version then redis.call('HSETNX', sub_key, 'since_version', version) end
end
for _, f in ipairs(given) do
  local v = new[f]
  if v and by_operator and v == '' then
    redis.call('HDEL', sub_key, 'set:' .. f)
  elseif v then
    if by_operator then redis.call('HSET', sub_key, 'set:' .. f, 1) end
    if f == 'gb' and (new['unit'] or redis.call('HGET', sub_key, 'unit') or 'groups') ~= 'groups' then
      redis.call('HSETNX', sub_key, f, v) -- cuts compute exactly what a version consumes
    elseif redis.call('HGET', sub_key, f) ~= v then
      redis.call('HSET', sub_key, f, v)
      changed = true
    end
  end
end
if not changed then return {tonumber(rev)} end
redis.call('HSETNX', sub_key, 'gen', 0)
redis.call('HSET', subs_key, 'sub:' .. name, 'live')
event(prefix, 'subs', '', '')
poke(prefix .. 'gate')
return {redis.call('HINCRBY', subs_key, 'rev', 1)}
