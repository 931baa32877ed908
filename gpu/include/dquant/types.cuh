// Integer types of the device code; any C++ compiler takes this header, for hosts that fill in parameters.
#pragma once

namespace dquant {

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

static_assert(sizeof(i16) == 2 && sizeof(i32) == 4 && sizeof(i64) == 8, "integers have the sizes their names say");

}  // namespace dquant
