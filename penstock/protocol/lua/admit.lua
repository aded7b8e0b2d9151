-- admit: - -> queued (producer). As many of the given jobs as every gate lets in, in order.
-- KEYS: source, subs, clock, then sub:NAME of every subscription that the gate counts
-- ARGV: prefix, lane, source field, expected position, revision of subs (-1: no gate), version field of clock,
--       keep the order for cohorts (0|1), per sub:NAME the number of its gate from 1 (commas; members of a pool share
--       one), then per job: id, n, body
-- Returns: {'ok', admitted, position} | {'moved', 0, position} | {'subs'} revision differs
--          | {'ended', 0, position} the data has ended (source train)
--          | {'closed', 0, position, number of the gate that has no room; 0: there is none}
-- Atomic because the position, the gate's stock and the queue must move as one: a producer that dies or is
-- doubled at any instant neither skips a prompt nor admits it twice.
local prefix, lane, name = ARGV[1], ARGV[2], ARGV[3]
local position = redis.call('HGET', KEYS[1], name) or '0'
if position ~= ARGV[4] then return {'moved', 0, position} end
local given = (#ARGV - 8) / 3
local last = name == 'train' and redis.call('HGET', KEYS[1], 'end')
if last then
  given = math.min(given, tonumber(last) - tonumber(position))
  if given <= 0 then return {'ended', 0, position} end
end
local room, tightest = given, 0
if ARGV[5] ~= '-1' then
  if (redis.call('HGET', KEYS[2], 'rev') or '0') ~= ARGV[5] then return {'subs'} end
  if #KEYS < 4 then return {'closed', 0, position, 0} end
  local admitted, gone = stock_of(prefix)
  for number, members in ipairs(gates_of(KEYS, 4, ARGV[8])) do
    local free = places(KEYS[2], members, admitted, gone)
    if free < room then room, tightest = free, number end
  end
end
if room <= 0 then return {'closed', 0, position, tightest} end
local nb = redis.call('HGET', KEYS[3], ARGV[6]) or '0'
local queued = 0
for i = 0, math.min(room, given) - 1 do
  local job, n, body = ARGV[9 + 3 * i], ARGV[10 + 3 * i], ARGV[11 + 3 * i]
  local set, index = string.match(job, '^(.*)/(%d+)$')
  local key = group_key(prefix, job)
  if redis.call('GETBIT', prefix .. 'done:' .. set, index) == 0 and redis.call('EXISTS', key) == 0 then
    local seq = count(prefix, 'seq:' .. lane)
    local eid = redis.call('XADD', lane_key(prefix, lane), '*', 'id', job, 'nb', nb, 'body', body)
    line_up(prefix, lane, eid, nb)
    redis.call('HSET', key, 'st', 'queued', 'ln', lane, 'cl', lane, 'eid', eid, 'n', n, 'c', 0, 'nb', nb, 'seq', seq)
    if ARGV[7] == '1' then
      redis.call('HSET', key, 'co', 1)
      redis.call('ZADD', prefix .. 'unfinished:' .. lane, seq, job)
    end
    queued = queued + 1
  end
end
if queued > 0 then
  count(prefix, 'admitted', queued)
  if lane == 'train' then redis.call('HINCRBY', prefix .. 'cohorts', nb, queued) end
  poke(prefix .. 'wake', queued)
end
local taken = math.min(room, given)
position = redis.call('HINCRBY', KEYS[1], name, taken)
return {'ok', taken, tostring(position)}
