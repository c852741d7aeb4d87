redis.register_function({ function_name = 'glidemq_version', flags = { 'no-writes' }, callback = function() return VERSION end })
