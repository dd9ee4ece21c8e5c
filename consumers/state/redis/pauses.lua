-- The functions of the Redis store for pauses, schedules and the logs of webhooks. Pauses are in one hash by id, each as
-- its end (0: none), a space and JSON; the last firings in another by schedule, each as its time, a space and the
-- request's id.
local function body_of(row)
  local until_ms, body = row:match('^(%d+) (.*)$')
  if until_ms == '0' or tonumber(until_ms) > now then return body end
end

function run.pauses()
  local found = {}
  for _, row in ipairs(redis.call('HVALS', KEYS[1])) do found[#found + 1] = body_of(row) end
  return found
end

function run.pause(id, row, at_most)
  local kept = redis.call('HGETALL', KEYS[1])
  for i = 1, #kept, 2 do
    if not body_of(kept[i + 1]) then redis.call('HDEL', KEYS[1], kept[i]) end
  end
  if redis.call('HLEN', KEYS[1]) - redis.call('HEXISTS', KEYS[1], id) >= tonumber(at_most) then return 0 end
  redis.call('HSET', KEYS[1], id, row)
  return 1
end

function run.resume(id)
  local row = redis.call('HGET', KEYS[1], id)
  redis.call('HDEL', KEYS[1], id)
  return row and body_of(row)
end

-- Logs of webhooks: a sorted set by their ends, and a hash.
function run.note_webhook(member, until_ms, row, most)
  redis.call('HSET', KEYS[2], member, row)
  redis.call('ZADD', KEYS[1], until_ms, member)
  local ended = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 100)
  local surplus = redis.call('ZRANGE', KEYS[1], 0, -1 - most)
  for _, members in ipairs({ended, surplus}) do
    for _, each in ipairs(members) do
      redis.call('ZREM', KEYS[1], each)
      redis.call('HDEL', KEYS[2], each)
    end
  end
end

function run.webhook(member)
  if tonumber(redis.call('ZSCORE', KEYS[1], member) or 0) > now then return redis.call('HGET', KEYS[2], member) end
end

function run.webhooks(most)
  local found = {}
  for _, member in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', '(' .. now, 'LIMIT', 0, most)) do
    found[#found + 1] = {member, redis.call('HGET', KEYS[2], member)}
  end
  return found
end

function run.fired(schedule, at_ms, id, instead_of_ms)
  local last = redis.call('HGET', KEYS[1], schedule)
  last = last and tonumber(last:match('^%d+'))
  if last and last >= tonumber(at_ms) and last ~= tonumber(instead_of_ms) then return end
  redis.call('HSET', KEYS[1], schedule, at_ms .. ' ' .. id)
end

function run.firings() return redis.call('HGETALL', KEYS[1]) end
