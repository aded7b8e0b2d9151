-- admit: - -> queued (producer). As many of the given jobs as every gate lets in, in order.
-- KEYS: source, subs, clock, then sub:NAME of every subscription that the gate counts
-- ARGV: prefix, lane, source field, expected position, revision of subs (-1: no gate), version field of clock,
--       keep the order for cohorts (0|1), per sub:NAME the number of its gate from 1 (commas; members of a pool share
--       one), then per job: id, n, body; of a line that is passed over '', 0 and the name of its dataset
-- Returns: {'ok', admitted, position} | {'moved', 0, position} | {'subs'} revision differs
--          | {'ended', 0, position} the data has ended (source train)
--          | {'closed', 0, position, number of the gate that has no room, or cannot be counted; 0: there is none}
-- Atomic because the position, the gate's stock and the queue must move as one: a producer that dies or is
-- doubled at any instant neither skips a prompt nor admits it twice.
local source_key, subs_key, clock_key = KEYS[1], KEYS[2], KEYS[3]
local first_sub_key = 4
local prefix, lane, source, expected = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local revision, clock_field, in_cohorts, gate_numbers = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local first_job = 9

local position = redis.call('HGET', source_key, source) or '0'
if position ~= expected then return {'moved', 0, position} end
local given = (#ARGV - first_job + 1) / 3
local last = source == 'train' and redis.call('HGET', source_key, 'end')
if last then
  given = math.min(given, tonumber(last) - tonumber(position))
  if given <= 0 then return {'ended', 0, position} end
end
local room, tightest = given, 0
if revision ~= '-1' then
  if (redis.call('HGET', subs_key, 'rev') or '0') ~= revision then return {'subs'} end
  if #KEYS < first_sub_key then return {'closed', 0, position, 0} end
  local admitted, gone = stock_of(prefix)
  for number, members in ipairs(gates_of(KEYS, first_sub_key, gate_numbers)) do
    local free = places(subs_key, members, admitted, gone) or -math.huge
    if free < room then room, tightest = free, number end
  end
end
if room <= 0 then return {'closed', 0, position, tightest} end
begin(prefix)
local nb = redis.call('HGET', clock_key, clock_field) or '0'
local queued = 0
for i = 0, math.min(room, given) - 1 do
  local at = first_job + 3 * i
  local job, n, body = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local set, index = string.match(job, '^(.*)/(%d+)$')
  local key = group_key_of(prefix, job)
  if job == '' then
    count(prefix, 'passed_lines:' .. body)
  elseif redis.call('GETBIT', prefix .. 'done:' .. set, index) == 0 and redis.call('EXISTS', key) == 0 then
    local seq = count(prefix, 'seq:' .. lane)
    local eid = redis.call('XADD', lane_key_of(prefix, lane), '*', 'id', job, 'nb', nb, 'body', body)
    line_up(prefix, lane, eid, nb)
    redis.call('HSET', key, 'st', 'queued', 'ln', lane, 'cl', lane, 'eid', eid, 'n', n, 'c', 0, 'nb', nb, 'seq', seq)
    if in_cohorts == '1' then
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
position = redis.call('HINCRBY', source_key, source, taken)
return {'ok', taken, tostring(position)}
