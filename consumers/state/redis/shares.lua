-- The functions of the Redis store for allowances by period.

-- The number of the period that counts, and the amount used in it. A later one than the caller's holds: another
-- process, whose clock is ahead, is in it already.
local function current(period)
  local found = redis.call('HMGET', KEYS[1], 'period', 'used')
  local stored = tonumber(found[1])
  if stored and stored >= tonumber(period) then return stored, tonumber(found[2]) end
  return period, 0
end
local function set_used(period, used, length_ms)
  redis.call('HSET', KEYS[1], 'period', period, 'used', used)
  redis.call('PEXPIRE', KEYS[1], 2 * length_ms)
end

-- What is reserved: a hash by id, of the period, a nonce and an amount; and a sorted set of the ids by their ends.
local function freed(id, nonce, period)
  local of, whose, amount = (redis.call('HGET', KEYS[2], id) or ''):match('^(%d+) (%S*) (%S+)$')
  if not of or (nonce and nonce ~= whose) then return 0 end
  redis.call('HDEL', KEYS[2], id)
  redis.call('ZREM', KEYS[3], id)
  return tonumber(of) == tonumber(period) and tonumber(amount) or 0
end

function run.take(number, length_ms, amount, limit, id, nonce, until_ms)
  local period, used = current(number)
  local ended = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 1000)
  ended[#ended + 1] = id
  local before = used
  for _, each in ipairs(ended) do used = used - freed(each, nil, period) end
  used = math.max(0, used)
  local granted = used + amount <= tonumber(limit)
  if granted then used = used + amount end
  if granted or used ~= before then set_used(period, used, length_ms) end
  if granted and id then
    redis.call('HSET', KEYS[2], id, string.format('%d %s %.17g', period, nonce, amount))
    redis.call('ZADD', KEYS[3], until_ms, id)
    for i = 2, 3 do redis.call('PEXPIRE', KEYS[i], 2 * length_ms) end
  end
  return {granted and 1 or 0, string.format('%.17g', used)}
end

function run.settle(number, length_ms, amount, id, nonce)
  local period, used = current(number)
  set_used(period, math.max(0, used - freed(id, nonce, period)) + amount, length_ms)
end

function run.give_back(number, length_ms, amount)
  local period, used = current(number)
  set_used(period, math.max(0, used - amount), length_ms)  -- it may have been taken in the period before
end

function run.probe()
  redis.call('SET', KEYS[1], '1', 'EX', 60)
end
