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

-- Logs of webhooks: a sorted set by their ends, and a hash. A member is its tenant, a colon and an id. If there are too
-- many, the first to end of the tenants that have most are removed: those with the highest number, if each tenant's are
-- counted from the last to end. Many are removed together, because all are read for it.
function run.note_webhook(member, until_ms, row, most)
  redis.call('HSET', KEYS[2], member, row)
  redis.call('ZADD', KEYS[1], until_ms, member)
  local removed = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 100)
  if redis.call('ZCARD', KEYS[1]) > most * 9 / 8 then
    local counts, numbered = {}, {}
    for at, each in ipairs(redis.call('ZREVRANGE', KEYS[1], 0, -1)) do
      local tenant = each:match('^[^:]*')
      counts[tenant] = (counts[tenant] or 0) + 1
      numbered[at] = {counts[tenant], at, each}
    end
    table.sort(numbered, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)
    for at = most + 1, #numbered do removed[#removed + 1] = numbered[at][3] end
  end
  for _, each in ipairs(removed) do
    redis.call('ZREM', KEYS[1], each)
    redis.call('HDEL', KEYS[2], each)
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
