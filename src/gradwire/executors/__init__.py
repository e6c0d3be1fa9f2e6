"""What carries schedules out: `plan` binds one to counts and a dtype, `python` runs it and defines its meaning."""
