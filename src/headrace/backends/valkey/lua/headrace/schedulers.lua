-- Schedules that Node processes wrote into P:schedulers, each a JSON text. Every Node worker and every broker may fire
-- them: a call does so only if the entry is still the one that the caller saw and no Node worker is at it.

do
  -- A job as Node's scheduler adds it: an automatic id, and a place by delay, priority and LIFO.
  local function add(queue, name, data, opts, attempts, priority, ttl, lifo, scheduler)
    local p, id = queue.p, nil
    repeat id = str(call('INCR', p .. ':id')) until call('EXISTS', p .. ':job:' .. id) == 0
    local job = adopt(queue, id, {})
    local fields = {
      id = id,
      name = name,
      data = data,
      opts = opts,
      timestamp = NOW_TEXT,
      attemptsMade = '0',
      delay = '0',
      priority = priority,
      maxAttempts = attempts,
      state = 'waiting',
    }
    if tonumber(ttl) > 0 then fields.expireAt = str(NOW + tonumber(ttl)) end
    if scheduler ~= '' then fields.schedulerName = scheduler end
    if lifo == '1' then fields.lifo = '1' end
    for field, value in pairs(fields) do put(job, field, value) end
    if tonumber(priority) > 0 then
      put(job, 'state', 'prioritized')
      call('ZADD', p .. ':scheduled', str(tonumber(priority) * BAND), id)
      wake(queue)
    elseif lifo == '1' then
      call('RPUSH', p .. ':lifo', id)
      wake(queue)
    else
      enter_waiting(job, true)
    end
    announce(queue, 'added', id, 'name', name)
    tell('pushed', job)
    return id
  end

  -- Put `after` (or nothing) in the place of `before` and add the job, all or nothing.
  verb('fireScheduler', 'name before after jobName data opts attempts priority ttl lifo schedulerName', function(queue, args)
    local key = queue.p .. ':schedulers'
    if call('EXISTS', key .. ':lock:__tick__') == 1 or call('HGET', key, args[2]) ~= args[3] then return { '' } end
    if args[4] == '' then call('HDEL', key, args[2]) else call('HSET', key, args[2], args[4]) end
    if args[5] == '' and args[6] == '' then return { '' } end
    return { add(queue, unpack(args, 5, 12)) }
  end, NEEDS_MEMORY)
end
