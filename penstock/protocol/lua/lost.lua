-- lost: the payload of a sample that was cut is gone (trainer that looked for it).
-- KEYS: counters (unused; it names the hash slot)
-- ARGV: prefix, then per sample: job, k
-- Returns: samples that nobody had reported before
-- Atomic because every rank and every delivery may find it, and it counts once.
local prefix = ARGV[1]
local first_sample = 2

freeing(prefix)
local new = 0
for i = first_sample, #ARGV, 2 do new = new + lose(prefix, ARGV[i], ARGV[i + 1]) end
return new
