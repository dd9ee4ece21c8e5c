-- The functions of the Redis store for the logs of webhooks: a sorted set by their ends, and a hash. A member is its
-- tenant, a colon and an id. If there are too many, the first to end of the tenants that have most are removed: those
-- with the highest number, if each tenant's are counted from the last to end. Many are removed together, because all are
-- read for it.
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
