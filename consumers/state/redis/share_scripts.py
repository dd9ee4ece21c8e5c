"""The Lua scripts of the Redis store for limits of waiting requests, allowances by period, and leases.

If Redis has no memory or disk space left, it refuses the first write of a script, so that a refused script has changed
nothing.
"""

from typing import Final

from consumers.state.redis.script import CLOCK, Script

RESERVE: Final = Script(
    CLOCK
    + """
local mine, all, tenant, member, nonce = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local redelivered, weight, until_ms = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local per_tenant, in_all = tonumber(ARGV[7]), tonumber(ARGV[8])
local function count(key) return redis.call('ZCOUNT', key, '(' .. now, '+inf') end
if tonumber(redis.call('ZSCORE', mine, member .. ' 1') or 0) > now then
  if redelivered == '1' then return 'kept' end
  member = member .. ' ' .. nonce
end
if count(mine) + weight > per_tenant then return 'tenant' end
if count(all) + weight > in_all then return 'all' end
for n = 1, weight do
  redis.call('ZADD', mine, until_ms, member .. ' ' .. n)
  redis.call('ZADD', all, until_ms, tenant .. ' ' .. member .. ' ' .. n)
end
for _, key in ipairs(KEYS) do
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)  -- last: Redis checks its memory only at the first write
  redis.call('PEXPIRE', key, math.max(redis.call('PTTL', key), until_ms - now, 1))
end
return 'kept'
"""
)
TAKE: Final = Script(
    CLOCK
    + """
local key, amount, limit, period_ms = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] * 1000
local period = math.floor(now / period_ms)
local found = redis.call('HMGET', key, 'period', 'used')
local used = tonumber(found[1]) == period and tonumber(found[2]) or 0
local granted = used + amount <= limit
if granted then
  used = used + amount
  redis.call('HSET', key, 'period', period, 'used', used)
  redis.call('PEXPIRE', key, 2 * period_ms)
end
return {granted and 1 or 0, string.format('%.17g', used), (period + 1) * period_ms - now}
"""
)
CORRECT: Final = Script(
    CLOCK
    + """
local key, amount, period_ms = KEYS[1], tonumber(ARGV[1]), ARGV[2] * 1000
local period = math.floor(now / period_ms)
local found = redis.call('HMGET', key, 'period', 'used')
local used = tonumber(found[1]) == period and tonumber(found[2]) or 0
redis.call('HSET', key, 'period', period, 'used', math.max(0, used - amount))
redis.call('PEXPIRE', key, 2 * period_ms)
"""
)
HOLD: Final = Script(
    CLOCK
    + """
local key, owner, for_ms = KEYS[1], ARGV[1], tonumber(ARGV[2])
local found = redis.call('HMGET', key, 'owner', 'token', 'lease')
local token = now
if found[1] then
  token = tonumber(found[2])
  if found[1] ~= owner then
    if tonumber(found[3]) > now then return nil end
    token = token + 1
  end
end
redis.call('HSET', key, 'owner', owner, 'token', token, 'lease', now + for_ms)
redis.call('PEXPIRE', key, for_ms + 86400000)
return token
"""
)
LET_GO: Final = Script(
    """
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then redis.call('HSET', KEYS[1], 'lease', 0) end
"""
)
