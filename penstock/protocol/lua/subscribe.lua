-- subscribe: make or change a subscription's definition.
-- KEYS: subs, sub:NAME
-- ARGV: prefix, name, revision it was planned at ('': any), by an operator (0|1), then field, value, ... of the definition
-- Returns: {revision of subs}; {-1}: one of this name was dropped before, {-5}: its pool was; {-2}: the revision moved;
--          {-3, field}: a field that cannot change once there are groups;
--          {-6, its mode, the one asked for}: groups were admitted and are cut by its mode; {-4, field, member}: a pool's members must
--          agree on it
-- Atomic because a cut or a seal that was planned on the old definition must see another revision.
-- What an operator set stays when the trainer comes back with its own definition; an operator's empty value lets go.
local prefix, name, operator = ARGV[1], ARGV[2], ARGV[4] == '1'
freeing(prefix)
-- groups remember the uses of the one that was dropped
if redis.call('HEXISTS', KEYS[1], 'was:' .. name) == 1 then return {-1} end
local rev = redis.call('HGET', KEYS[1], 'rev') or '0'
if ARGV[3] ~= '' and ARGV[3] ~= rev then return {-2} end
local live = redis.call('HGET', KEYS[1], 'sub:' .. name) == 'live'
local given, new = {}, {}
for i = 5, #ARGV, 2 do
  local f, v = ARGV[i], ARGV[i + 1]
  given[#given + 1] = f
  if operator or redis.call('HEXISTS', KEYS[2], 'set:' .. f) == 0 then new[f] = v end
end
local mode = live and redis.call('HGET', KEYS[2], 'mode')
if mode and new['mode'] and new['mode'] ~= mode then return {-6, mode, new['mode']} end
-- groups remember uses by the pool, and places at the gate by the size of what consumed them
local account = new['share'] or redis.call('HGET', KEYS[2], 'share') or ''
if live and account ~= (redis.call('HGET', KEYS[2], 'share') or '') then return {-3, 'share'} end
if account ~= '' then
  if redis.call('HEXISTS', KEYS[1], 'was:share:' .. account) == 1 then return {-5} end
  for _, f in ipairs(redis.call('HKEYS', KEYS[1])) do
    local other = string.match(f, '^sub:(.*)$')
    if other and other ~= name then
      local key = prefix .. 'sub:' .. other
      if redis.call('HGET', key, 'share') == account then
        for _, g in ipairs({'lanes', 'bound', 'on_expiry', 'model', 'reuse', 'filters', 'on_filter_error'}) do
          if new[g] and new[g] ~= (redis.call('HGET', key, g) or '') then return {-4, g, other} end
        end
      end
    end
  end
  redis.call('HSETNX', KEYS[1], 'start:' .. account, redis.call('HGET', prefix .. 'counters', 'gone:train') or 0)
end
local changed = not live
-- what was gone before it came is not of its stock at the gate
if changed then
  redis.call('HSETNX', KEYS[2], 'start', redis.call('HGET', prefix .. 'counters', 'gone:train') or 0)
  redis.call('HSETNX', KEYS[2], 'seen', now_ms())
  local from = new['from'] or 'oldest'
  local since, version = string.match(from, '^completed:(%d+)$'), string.match(from, '^version:(%d+)$')
  if from == 'newest' then since = redis.call('HGET', prefix .. 'counters', 'completed') or 0 end
  if since then redis.call('HSETNX', KEYS[2], 'since', since) end
  if version then redis.call('HSETNX', KEYS[2], 'since_version', version) end
end
for _, f in ipairs(given) do
  local v = new[f]
  if v and operator and v == '' then
    redis.call('HDEL', KEYS[2], 'set:' .. f)
  elseif v then
    if operator then redis.call('HSET', KEYS[2], 'set:' .. f, 1) end
    if f == 'gb' and (new['unit'] or redis.call('HGET', KEYS[2], 'unit') or 'groups') ~= 'groups' then
      redis.call('HSETNX', KEYS[2], f, v) -- the cuts know better what a version consumes
    elseif redis.call('HGET', KEYS[2], f) ~= v then
      redis.call('HSET', KEYS[2], f, v)
      changed = true
    end
  end
end
if not changed then return {tonumber(rev)} end
redis.call('HSETNX', KEYS[2], 'gen', 0)
redis.call('HSET', KEYS[1], 'sub:' .. name, 'live')
event(prefix, 'subs', '', '')
poke(prefix .. 'gate')
return {redis.call('HINCRBY', KEYS[1], 'rev', 1)}
