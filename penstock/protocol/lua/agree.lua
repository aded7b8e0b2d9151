-- agree: a rank reports what it is about to do, and reads the reports of the other ranks of its role (before a step).
-- KEYS: sub:NAME, agree:NAME
-- ARGV: prefix, owner, gen, round, role, rank, ranks, its report, seconds the reports are kept
-- Returns: {'owner'}, or {'ok', report of rank 0, ...}; '' for a rank without a report in this round
-- Atomic because the report of a rank with an older owner or generation must not count. Two rounds are kept: no rank
-- begins round r + 1 before it has read all reports of round r, so r - 1 is over for all (T14).
local sub_key, words_key = KEYS[1], KEYS[2]
local prefix, owner, gen, round, role = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local caller, num_ranks, word, ttl_s = ARGV[6], tonumber(ARGV[7]), ARGV[8], ARGV[9]

freeing(prefix)
if not owns(sub_key, owner, gen) then return {'owner'} end
local mark = owner .. ' ' .. gen .. ' ' .. round .. ' '
local function name(rank) return role .. '/' .. rank .. '/' .. (tonumber(round) % 2) end
redis.call('HSET', words_key, name(caller), mark .. word)
redis.call('EXPIRE', words_key, ttl_s)
local said = {'ok'}
for rank = 0, num_ranks - 1 do
  local heard = redis.call('HGET', words_key, name(rank)) or ''
  said[#said + 1] = string.sub(heard, 1, #mark) == mark and string.sub(heard, #mark + 1) or ''
end
return said
